"""What the tables of the pages are made from: a module a kind of result."""

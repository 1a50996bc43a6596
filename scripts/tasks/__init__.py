"""Instruction text of six categories, made from closed word lists and small grammars.

All of it is the project's own. Every category is a function (rng, held_out) ->
[(question, answer), ...]; the order of its draws is fixed, so a seed names a text.
"""

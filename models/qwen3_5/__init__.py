"""Qwen3.5: a hybrid of gated delta rule and gated attention layers with an MTP head."""

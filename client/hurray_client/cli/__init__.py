"""hurrayctl, the tool people type."""

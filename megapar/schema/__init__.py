"""The forms of a flag and of a rule, as data. Everything above may use them, also the descriptions of models."""

"""fourfold: predict, choose, run, keep and show layouts of language-model pretraining."""

__version__ = "0.1.0"

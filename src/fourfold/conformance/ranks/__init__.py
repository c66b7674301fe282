"""What runs in ranks of an engine under test. These files import torch, the engine and each other,
nothing else of fourfold: `repro.py` joins them to one script that runs without it."""

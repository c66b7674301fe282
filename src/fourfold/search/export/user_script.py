"""What exports share whose model and loop are the user's script, which torchrun starts: the library
only reads a configuration."""

from __future__ import annotations

from fourfold.search.export.setup import Choices, Setup

CHOICES: Choices = {
    "policy.attention": ("auto",),
    "policy.compile": (False,),
    "policy.sequence_parallel": (False,),
    "policy.reduce_dtype": (None,),
    "policy.routing": ("natural",),
}
ENTRY = '"${TRAIN:?set TRAIN: your training script}"'


def accumulated(setup: Setup) -> int:
    """Return the micro batches of a step of one data-parallel rank."""
    return setup.batch.global_batch // (setup.layout.dp * setup.batch.micro_batch)


def left_to_script(setup: Setup) -> str:
    """What a configuration has no place for."""
    recompute = ", gradient checkpointing" if setup.policy.recompute == "full" else ""
    return (
        f"in TRAIN: the model, data of {setup.batch.seq_len} tokens, micro batch "
        f"{setup.batch.micro_batch}, gradients of {accumulated(setup)} accumulated{recompute}"
    )

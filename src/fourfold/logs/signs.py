"""What a configuration says of the tokens and of routing, in the words by which `report` tells a
training from a benchmark (tables/equivalence.py)."""

from __future__ import annotations

import re

from fourfold.logs.nested import Flat, is_none, yes

# End of a setting's path -> what it says where it is on, or is set at all.
_ON = {
    "mock_data": "random tokens",  # Megatron
    "moe_router_force_load_balancing": "forced routing",
    "moe_force_load_balance": "forced routing",  # torchtitan
}
_SET = re.compile(
    r"(?:(?:^|\.)(?:train_)?data_path"  # Megatron, GPT-NeoX
    r"|(?:training|dataloader)\.dataset(?:_path)?"  # torchtitan
    r"|dataset\.(?:hf_dataset_or_datasets|dataset_folder)"  # nanotron
    r"|train_loader\.dataset\.(?:remote|local|hf_name))$"  # llm-foundry
)
_NO_DATA = {"data.data_impl": ("mock",), "data.dataset": ("none", "null")}  # NeMo 1; nanotron


def words_of(flat: Flat) -> str:
    """'random tokens, forced routing'; 'real tokens' where data are named and not replaced."""
    found = set()
    for path, value in flat.items():
        found |= {word for end, word in _ON.items() if path.endswith(end) and yes(value)}
        if any(path.endswith(end) and value.lower() in none for end, none in _NO_DATA.items()):
            found.add("random tokens")
        elif _SET.search(path) and not is_none(value):
            found.add("real tokens")
    if "random tokens" in found:
        found.discard("real tokens")
    return ", ".join(sorted(found, reverse=True))

"""Who wrote a line of a log, and when: what launchers and log collectors put before it."""

from __future__ import annotations

import re

# torchrun --tee, srun --label, mpirun --tag-output, Megatron; Ray and SkyPilot; kubectl --prefix;
# TorchX and NeMo-Run; pdsh by address.
_LABEL = (
    r"\[(?:default|rank)?[0-9]{1,7}\]:? ?"
    r"|[0-9]{1,7}:(?: |$)"
    r"|\[[0-9]{1,9},[0-9]{1,7}\]<std(?:out|err)>:? ?"
    r"|\((?:[\w.-]{1,60},? )?(?:rank=[0-9]{1,7}, )?pid=[0-9]{1,9}(?:, ip=[0-9a-f.:]{3,45})?\) ?"
    r"|\[(?:pod|po)/[\w./-]{1,200}\] ?"
    r"|[\w.-]{1,60}/[0-9]{1,7} (?=\[(?:default|rank)[0-9])"
    r"|(?:[0-9]{1,3}\.){3}[0-9]{1,3}: ?"
)
_STAMP = (
    r"\[?[0-9]{4}-[0-9]{2}-[0-9]{2}[T ][0-9]{2}:[0-9]{2}:[0-9]{2}(?:[.,][0-9]{1,9})?"
    r"(?:Z|[+-][0-9]{2}:?[0-9]{2})?\]?(?: |$)"
)
_BEFORE = re.compile(rf"\s{{0,8}}(?:({_LABEL})|{_STAMP})")
_MOST = 4


def unlabelled(text: str) -> tuple[str, str]:
    """(label as printed, '' where there is none; the line without it and without times). What the
    line was indented by stays."""
    label = ""
    for _ in range(_MOST):
        found = _BEFORE.match(text)
        if found is None:
            break
        label += (found.group(1) or "").strip()
        text = text[found.end() :]
    return label, text

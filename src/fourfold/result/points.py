"""Single measurements of a machine, as raw seconds of a known work."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True, kw_only=True)
class GemmPoint:
    """One matrix product [m, k] x [k, n]."""

    dtype: str
    m: int
    n: int
    k: int
    seconds: float

    @property
    def flops_per_s(self) -> float:
        return 2.0 * self.m * self.n * self.k / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class FlashShape:
    """What a flash kernel loses to the shape of its work. It takes 128 rows of one head at a time.
    Such a block costs so many keys beside its own (half a tile of the diagonal, loading, writing;
    backwards also gradients that blocks add up), and at the end of a kernel each multiprocessor
    waits for the last ones as long as `last_blocks` mean blocks take."""

    forward_keys: Any
    backward_keys: Any
    backward_rate: Any  # against the forward pass
    last_blocks: Any

    def filled(self, blocks: Any, sms: Any) -> Any:
        """The share of its rate that so few blocks leave."""
        return blocks / (blocks + self.last_blocks * sms)

    def share(self, point: AttentionPoint, sms: int) -> float:
        """Of a kernel's rate in both passes of a measured shape."""
        forward = 1.0 + self.forward_keys / point.seq_len
        backward = (1.0 + self.backward_keys / point.seq_len) / self.backward_rate
        blocks = point.batch * point.heads * point.seq_len / BLOCK_ROWS
        return 7.0 / (2.0 * forward + 5.0 * backward) * self.filled(blocks, sms)


BLOCK_ROWS = 128.0
# cuDNN's kernels on an H200 (results/h200/kernels.csv), from 512 to 16,384 tokens and from 256
# blocks to 4,096: median error 3%, at most 10% but for one shape.
NEWER_FLASH = FlashShape(
    forward_keys=400.0, backward_keys=900.0, backward_rate=0.88, last_blocks=1.2
)
# FlashAttention 2, which older GPUs run too: keys as measured on the H200. Its last blocks were not
# measured alone: half of one, as where any multiprocessor takes the next, explains tables of A100.
FLASH2 = FlashShape(forward_keys=300.0, backward_keys=660.0, backward_rate=0.92, last_blocks=0.5)
# Cores share what is left of the last blocks.
CPU_FLASH = FlashShape(forward_keys=512.0, backward_keys=512.0, backward_rate=0.85, last_blocks=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionPoint:
    """Causal attention of `heads` heads over `seq_len` tokens, forward and backward apart."""

    kernel: str
    dtype: str
    batch: int
    heads: int
    head_size: int
    seq_len: int
    forward_s: float
    backward_s: float

    @property
    def flops_per_s(self) -> float:
        """Both ways, counting the causal half: 2 + 5 products of s x s/2 x head size."""
        pairs = self.batch * self.heads * self.seq_len**2 / 2
        return 2.0 * 7.0 * pairs * self.head_size / (self.forward_s + self.backward_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class CopyPoint:
    """`moved_bytes` were read and as many written."""

    moved_bytes: int
    seconds: float

    @property
    def bytes_per_s(self) -> float:
        return 2.0 * self.moved_bytes / self.seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class CollectivePoint:
    """`payload_bytes`: the whole tensor (gathered output, scattered input); p2p: the message.
    `hosts`: several have one rank each of the group, while their other ranks do the same."""

    op: str
    ranks: int
    payload_bytes: int
    seconds: float
    hosts: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedPoint:
    """What one rank gets while `ranks` of them work on this host at once."""

    ranks: int
    dtype: str
    flops_per_s: float
    bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class HostPoint:
    """What a rank of our engine gets on a CPU while `ranks` of them do the same: `products` as
    linear layers compute them, attention, what else is in a layer (`element_bytes` read and
    written), an update of `update_params` weights, a layer too small to
    compute, both ways, alone and `wrapped` by FSDP that sends everything; a small gathering as
    tensor parallelism `called` it (0: one rank). `unsteady`: by what share readings of the same
    differed."""

    ranks: int
    products: tuple[GemmPoint, ...]
    attention: AttentionPoint
    element_bytes: int
    element_s: float
    update_params: int
    update_s: float
    layer_s: float
    wrapped_s: float
    called_s: float
    unsteady: float = 0.0

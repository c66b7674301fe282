"""Environment variables that a file may set for a run: names, each with the form of its values.

What names a file, a folder, a plugin, a loader, a compiler or an interpreter loads code or writes
where it says; that is taken from the command line only (`--env NAME=VALUE`), for this one start.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from fourfold.errors import UserError, nearest

Env = tuple[tuple[str, str], ...]
MAX_VARIABLES, MAX_NAME_CHARS, MAX_VALUE_CHARS = 64, 128, 1024
_NAME = re.compile(rf"[A-Za-z_][A-Za-z0-9_]{{0,{MAX_NAME_CHARS - 1}}}")
# What the launcher itself tells its processes; another value would make it lose them.
_RESERVED = re.compile(
    r"FOURFOLD_[A-Z0-9_]*|RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR"
    r"|MASTER_PORT|TORCHELASTIC_[A-Z0-9_]*"
)

_WHOLE = r"-?[0-9]{1,12}"
_SWITCH = r"[01]"
_TRUTH = r"0|1|true|false|TRUE|FALSE|True|False"
_WORD = r"[A-Za-z0-9_.:-]{1,64}"
_DEVICES = rf"[=^]{{0,2}}{_WORD}(?:,{_WORD}){{0,15}}"
_LEVEL = r"(?i:loc|nvl|pix|pxb|p2c|pxn|phb|sys)|[0-9]"
_ALGORITHM = r"(?i:tree|ring|collnet|collnetdirect|collnetchain|nvls|nvlstree|pat)"
_COLLECTIVE = r"(?i:broadcast|reduce|allgather|reducescatter|allreduce|sendrecv)"
_PROTOCOL = r"(?i:ll|ll128|simple)"
_SUBSYSTEM = (
    r"\^?(?i:init|coll|p2p|shm|net|graph|tuning|env|alloc|call|proxy|nvls|bootstrap|reg|profile"
    r"|ras|all)"
)
_RATIO = r"0?\.[0-9]{1,6}|[01](?:\.0{1,6})?"
_ALLOCATOR = "|".join(
    (
        r"(?:expandable_segments|pinned_use_cuda_host_register|pinned_use_background_threads"
        r"|release_lock_on_cudamalloc|graph_capture_record_stream_reuse):(?:True|False)",
        r"(?:max_split_size_mb|max_non_split_rounding_mb|pinned_num_register_threads"
        r"|roundup_power2_divisions):[0-9]{1,9}",
        r"roundup_power2_divisions:\[(?:(?:[0-9]{1,9}|>):[0-9]{1,3},?){1,16}\]",
        rf"(?:garbage_collection_threshold|per_process_memory_fraction):(?:{_RATIO})",
        r"backend:(?:native|cudaMallocAsync)",
    )
)
_GPU = r"[0-9]{1,4}|(?:GPU|MIG)-[0-9a-fA-F-]{1,64}|-1"


def _list(item: str, separator: str = ",") -> str:
    return rf"(?:{item})(?:{separator}(?:{item})){{0,31}}"


# form of the values -> names.
_FORMS: tuple[tuple[str, str], ...] = (
    (_SWITCH, "NCCL_IB_DISABLE NCCL_P2P_DISABLE NCCL_P2P_DIRECT_DISABLE NCCL_SHM_DISABLE"),
    (_SWITCH, "NCCL_PXN_DISABLE NCCL_NVB_DISABLE NCCL_NET_DISABLE_INTRA NCCL_CHECKS_DISABLE"),
    (_SWITCH, "NCCL_CHECK_POINTERS NCCL_GRAPH_REGISTER NCCL_LOCAL_REGISTER NCCL_SET_THREAD_NAME"),
    (_SWITCH, "NCCL_IGNORE_CPU_AFFINITY NCCL_COLLNET_ENABLE NCCL_DMABUF_ENABLE NCCL_RAS_ENABLE"),
    (_SWITCH, "NCCL_NET_GDR_READ NCCL_NET_SHARED_BUFFERS NCCL_NET_SHARED_COMMS NCCL_WIN_ENABLE"),
    (_SWITCH, "NCCL_IB_SPLIT_DATA_ON_QPS NCCL_IB_ECE_ENABLE NCCL_IB_MERGE_NICS"),
    (_SWITCH, "NCCL_RUNTIME_CONNECT NCCL_COMM_BLOCKING NCCL_P2P_USE_CUDA_MEMCPY"),
    (_SWITCH, "NCCL_GRAPH_MIXING_SUPPORT NCCL_GDRCOPY_ENABLE NCCL_NET_FORCE_FLUSH"),
    (_WHOLE, "NCCL_CROSS_NIC NCCL_BUFFSIZE NCCL_NTHREADS NCCL_MIN_NCHANNELS NCCL_MAX_NCHANNELS"),
    (_WHOLE, "NCCL_MIN_CTAS NCCL_MAX_CTAS NCCL_MIN_P2P_NCHANNELS NCCL_MAX_P2P_NCHANNELS"),
    (_WHOLE, "NCCL_NCHANNELS_PER_NET_PEER NCCL_P2P_NET_CHUNKSIZE NCCL_P2P_NVL_CHUNKSIZE"),
    (_WHOLE, "NCCL_P2P_PCI_CHUNKSIZE NCCL_LL_THRESHOLD NCCL_TREE_THRESHOLD NCCL_CTA_POLICY"),
    (_WHOLE, "NCCL_SOCKET_NTHREADS NCCL_NSOCKS_PERTHREAD NCCL_SOCKET_RETRY_CNT"),
    (_WHOLE, "NCCL_SOCKET_RETRY_SLEEP_MSEC NCCL_IB_TIMEOUT NCCL_IB_RETRY_CNT NCCL_IB_GID_INDEX"),
    (_WHOLE, "NCCL_IB_SL NCCL_IB_TC NCCL_IB_FIFO_TC NCCL_IB_AR_THRESHOLD"),
    (_WHOLE, "NCCL_IB_QPS_PER_CONNECTION NCCL_IB_PCI_RELAXED_ORDERING NCCL_IB_ADAPTIVE_ROUTING"),
    (_WHOLE, "NCCL_IB_ROCE_VERSION_NUM NCCL_MEM_SYNC_DOMAIN NCCL_NVLS_ENABLE NCCL_NVLS_NCHANNELS"),
    (_WHOLE, "NCCL_NVLS_CHUNKSIZE NCCL_MNNVL_ENABLE NCCL_CUMEM_ENABLE NCCL_CUMEM_HOST_ENABLE"),
    (_WHOLE, "NCCL_WORK_FIFO_BYTES NCCL_COLLNET_NODE_THRESHOLD NCCL_NET_GDR_C2C"),
    (_WHOLE, "NCCL_PROGRESS_APPENDOP_FREQ NCCL_UID_STAGGER_RATE NCCL_UID_STAGGER_THRESHOLD"),
    (_LEVEL, "NCCL_P2P_LEVEL NCCL_NET_GDR_LEVEL NCCL_P2P_PXN_LEVEL"),
    (_DEVICES, "NCCL_SOCKET_IFNAME NCCL_IB_HCA GLOO_SOCKET_IFNAME TP_SOCKET_IFNAME"),
    (r"AF_INET6?", "NCCL_SOCKET_FAMILY NCCL_IB_ADDR_FAMILY"),
    (r"(?i:ib|socket)", "NCCL_NET"),  # another one is a plugin's
    (r"(?i:parallel|group)", "NCCL_LAUNCH_MODE"),
    (_list(rf"(?:{_COLLECTIVE}:)?\^?{_list(_ALGORITHM)}", ";"), "NCCL_ALGO"),
    (_list(rf"(?:{_COLLECTIVE}:)?\^?{_list(_PROTOCOL)}", ";"), "NCCL_PROTO"),
    (r"(?i:version|warn|info|abort|trace)", "NCCL_DEBUG"),
    (_list(_SUBSYSTEM), "NCCL_DEBUG_SUBSYS"),
    (_TRUTH, "TORCH_NCCL_BLOCKING_WAIT TORCH_NCCL_AVOID_RECORD_STREAMS TORCH_NCCL_HIGH_PRIORITY"),
    (_TRUTH, "TORCH_NCCL_ENABLE_MONITORING TORCH_NCCL_ENABLE_TIMING TORCH_NCCL_DESYNC_DEBUG"),
    (_TRUTH, "TORCH_NCCL_NAN_CHECK TORCH_NCCL_CUDA_EVENT_CACHE TORCH_NCCL_USE_COMM_NONBLOCKING"),
    (_TRUTH, "TORCH_NCCL_USE_TENSOR_REGISTER_ALLOCATOR_HOOK TORCH_SHOW_CPP_STACKTRACES"),
    (_TRUTH, "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE TORCH_BLAS_PREFER_CUBLASLT"),
    (_TRUTH, "TORCH_COMPILE_DISABLE TORCHDYNAMO_DISABLE PYTORCH_NO_CUDA_MEMORY_CACHING"),
    (_TRUTH, "PYTORCH_NVML_BASED_CUDA_CHECK TOKENIZERS_PARALLELISM"),
    (_WHOLE, "TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_HEARTBEAT_TIMEOUT_SEC"),
    (_WHOLE, "TORCH_NCCL_TRACE_BUFFER_SIZE TORCH_FR_BUFFER_SIZE TORCH_NCCL_COORD_CHECK_MILSEC"),
    (_SWITCH, "TORCHINDUCTOR_MAX_AUTOTUNE TORCHINDUCTOR_MAX_AUTOTUNE_GEMM"),
    (_SWITCH, "TORCHINDUCTOR_MAX_AUTOTUNE_POINTWISE TORCHINDUCTOR_COORDINATE_DESCENT_TUNING"),
    (_SWITCH, "TORCHINDUCTOR_FX_GRAPH_CACHE TORCHINDUCTOR_FORCE_DISABLE_CACHES"),
    (_SWITCH, "TORCHINDUCTOR_SHAPE_PADDING TORCHINDUCTOR_CUDAGRAPHS"),
    (_SWITCH, "TORCHINDUCTOR_EMULATE_PRECISION_CASTS TORCHINDUCTOR_LAYOUT_OPTIMIZATION"),
    (_WHOLE, "TORCHINDUCTOR_COMPILE_THREADS"),
    (r"(?i:off|info|detail)", "TORCH_DISTRIBUTED_DEBUG"),
    (r"(?i:info|warning|error|fatal)|[0-3]", "TORCH_CPP_LOG_LEVEL"),
    (_list(_ALLOCATOR), "PYTORCH_CUDA_ALLOC_CONF PYTORCH_ALLOC_CONF PYTORCH_HIP_ALLOC_CONF"),
    (_SWITCH, "CUDA_LAUNCH_BLOCKING CUDA_CACHE_DISABLE CUDA_FORCE_PTX_JIT CUDA_DISABLE_PTX_JIT"),
    (_SWITCH, "NVIDIA_TF32_OVERRIDE TRITON_PRINT_AUTOTUNING FI_EFA_USE_DEVICE_RDMA"),
    (_SWITCH, "FI_EFA_FORK_SAFE RDMAV_FORK_SAFE"),
    (_WHOLE, "CUDA_DEVICE_MAX_CONNECTIONS CUDA_CACHE_MAXSIZE CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"),
    (_WHOLE, "CUBLASLT_WORKSPACE_SIZE"),
    (rf"|{_list(_GPU)}", "CUDA_VISIBLE_DEVICES"),
    (r"FASTEST_FIRST|PCI_BUS_ID", "CUDA_DEVICE_ORDER"),
    (r"EAGER|LAZY|DEFAULT", "CUDA_MODULE_LOADING CUDA_MODULE_DATA_LOADING"),
    (r"0\.25x|0\.5x|1x|2x|4x", "CUDA_SCALE_LAUNCH_QUEUES"),
    (r"(?::[0-9]{1,9}:[0-9]{1,4}){1,8}", "CUBLAS_WORKSPACE_CONFIG"),
    (_list(r"[1-9][0-9]{0,4}"), "OMP_NUM_THREADS"),
    (_WHOLE, "MKL_NUM_THREADS OPENBLAS_NUM_THREADS OMP_MAX_ACTIVE_LEVELS OMP_THREAD_LIMIT"),
    (_WHOLE, "MALLOC_ARENA_MAX MALLOC_TRIM_THRESHOLD_ MALLOC_MMAP_THRESHOLD_"),
    (_TRUTH, "OMP_DYNAMIC MKL_DYNAMIC KMP_SETTINGS"),
    (_list(r"(?i:true|false|close|spread|master|primary)"), "OMP_PROC_BIND"),
    (r"(?i:active|passive)", "OMP_WAIT_POLICY"),
    (r"(?i:threads|cores|sockets|ll_caches|numa_domains)(?:\([0-9]{1,5}\))?", "OMP_PLACES"),
    (r"(?i:static|dynamic|guided|auto)(?:,[0-9]{1,9})?", "OMP_SCHEDULE"),
    (r"(?i:none|compact|scatter|balanced|disabled|verbose|granularity=(?:fine|core|thread)|[0-9]{1,4}"
     r")(?:,(?i:none|compact|scatter|balanced|verbose|granularity=(?:fine|core|thread)|[0-9]{1,4})"
     r"){0,7}", "KMP_AFFINITY"),
    (r"[0-9]{1,9}|(?i:infinite)", "KMP_BLOCKTIME"),
    (_list(r"[0-9]{1,5}(?:-[0-9]{1,5}(?::[0-9]{1,5})?)?", "[, ]"), "GOMP_CPU_AFFINITY"),
    (r"(?i:auto|compatible|sse2|sse4_2|avx|avx2|avx512|off)", "MKL_CBWR"),
    (r"(?i:default|sse41|avx|avx2|avx512_core|avx512_core_vnni|avx512_core_bf16|avx512_core_amx)",
     "ONEDNN_MAX_CPU_ISA DNNL_MAX_CPU_ISA"),
    (r"(?i:strict|bf16|f16|tf32|any)", "ONEDNN_DEFAULT_FPMATH_MODE"),
    (r"(?i:efa|tcp|verbs|psm3|cxi|shm|sockets)", "FI_PROVIDER"),
)  # fmt: skip
PLAIN: dict[str, str] = {name: form for form, names in _FORMS for name in names.split()}
assert len(PLAIN) == sum(len(names.split()) for _, names in _FORMS), "a name stands twice"


def require_form(env: Env) -> None:
    """What holds for every variable, whoever sets it: a name, and one short line as its value."""
    if len(env) > MAX_VARIABLES:
        raise UserError(f"has more than {MAX_VARIABLES} variables", field="env", value=len(env))
    if len({name for name, _ in env}) != len(env):
        raise UserError("names a variable twice", field="env", value=[name for name, _ in env])
    for name, value in env:
        if not _NAME.fullmatch(name):
            raise UserError("is not a variable name", field="env", value=name)
        if len(value) > MAX_VALUE_CHARS or not value.isprintable():
            rule = f"must be printable text of at most {MAX_VALUE_CHARS} characters"
            raise UserError(rule, field=f"env.{name}", value=value)


def is_plain(name: str, value: str) -> bool:
    """Whether a file may set it."""
    form = PLAIN.get(name)
    return form is not None and re.fullmatch(form, value) is not None


def require_plain(env: Env, *, granted: Env = ()) -> None:
    """Refuse what a file may not set, unless the command line `granted` it with this very value."""
    for name, value in env:
        field, hint = f"policy.env.{name}", "remove it"
        if _RESERVED.fullmatch(name):
            rule = "is set by fourfold for its own processes"
            raise UserError(rule, field=field, value=value, hint=hint)
        if is_plain(name, value) or (name, value) in granted:
            continue
        rule = "has a value that a file may not give it"
        if name not in PLAIN:
            rule, guess = "is not a variable that a file may set", nearest(name, PLAIN)
            hint += f" ({guess})" if guess.startswith("did you mean") else ""
        hint += f" or, if you trust it, pass --env {name}=VALUE on the command line of every start"
        raise UserError(rule, field=field, value=value, hint=hint)


def parse_assignments(words: Iterable[str]) -> Env:
    """`--env NAME=VALUE`, in order; the same name twice must say the same."""
    values: dict[str, str] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise UserError("must be NAME=VALUE", field="--env", value=word)
        if values.setdefault(name, value) != value:
            raise UserError("is given two values", field="--env", value=name)
    env = tuple(values.items())
    require_form(env)
    return env

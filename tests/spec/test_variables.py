"""Which variables may a file set? Only listed names, only values of their form: nothing that loads
code, names a file or reaches another line."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from fourfold.errors import UserError
from fourfold.spec import codec
from fourfold.spec.policy import Policy
from fourfold.spec.site import (
    MAX_VALUE_CHARS,
    is_plain,
    parse_assignments,
    plain_forms,
    require_form,
    require_plain,
)

PLAIN = plain_forms()

# Each of these loads code, picks an interpreter or a compiler, or writes a file where it says.
NAMES = """
LD_PRELOAD LD_LIBRARY_PATH LD_AUDIT DYLD_INSERT_LIBRARIES PYTHONPATH PYTHONHOME PYTHONSTARTUP
PYTHONUSERBASE PYTHONINSPECT PYTHONWARNINGS PYTHONPYCACHEPREFIX PATH HOME TMPDIR SHELL IFS BASH_ENV
ENV CC CXX CFLAGS LDFLAGS TORCHINDUCTOR_CACHE_DIR TORCH_COMPILE_DEBUG TORCH_COMPILE_DEBUG_DIR
TORCH_LOGS TORCH_LOGS_OUT TORCH_TRACE TORCH_EXTENSIONS_DIR TORCH_HOME TORCH_USE_CUDA_DSA
TORCH_NCCL_DEBUG_INFO_TEMP_FILE TORCH_NCCL_DEBUG_INFO_PIPE_FILE TORCH_NCCL_DUMP_ON_TIMEOUT
TORCH_FR_DUMP_TEMP_FILE TORCHINDUCTOR_CUTLASS_DIR TRITON_CACHE_DIR TRITON_DUMP_DIR TRITON_HOME
TRITON_PTXAS_PATH TRITON_LIBCUDA_PATH TRITON_KERNEL_OVERRIDE NCCL_NET_PLUGIN NCCL_TUNER_PLUGIN
NCCL_PROFILER_PLUGIN NCCL_ENV_PLUGIN NCCL_GIN_PLUGIN NCCL_DEBUG_FILE NCCL_TOPO_FILE
NCCL_TOPO_DUMP_FILE NCCL_GRAPH_FILE NCCL_GRAPH_DUMP_FILE NCCL_CONF_FILE NCCL_COMM_ID NCCL_RAS_ADDR
CUDA_CACHE_PATH CUDA_HOME CUDA_PATH CUDA_INJECTION64_PATH CUDA_COREDUMP_FILE
CUDA_ENABLE_COREDUMP_ON_EXCEPTION CUDA_MPS_PIPE_DIRECTORY CUBLAS_LOGDEST_DBG CUDNN_LOGDEST_DBG
OMP_TOOL_LIBRARIES OMP_TOOL FI_PROVIDER_PATH GCONV_PATH LOCPATH NLSPATH MALLOC_CONF HF_HOME
SSL_CERT_FILE WANDB_DIR NVIDIA_DRIVER_CAPABILITIES KINETO_CONFIG KINETO_DAEMON_INIT_DELAY_S
"""
DANGEROUS = NAMES.split()


@pytest.mark.parametrize("name", DANGEROUS)
def test_what_loads_code_or_writes_files_is_not_for_files(name: str) -> None:
    for value in ("/tmp/x.so", "x", "1", ""):
        assert not is_plain(name, value)
        with pytest.raises(UserError, match=f"--env {name}="):
            require_plain(((name, value),))
        require_plain(((name, value),), granted=((name, value),))
        with pytest.raises(UserError, match=name):
            require_plain(((name, value),), granted=((name, value + "2"),))


@pytest.mark.parametrize("name", ["RANK", "MASTER_ADDR", "FOURFOLD_JOB", "TORCHELASTIC_RUN_ID"])
def test_what_the_launcher_says_itself_is_nobodys(name: str) -> None:
    with pytest.raises(UserError, match="its own processes"):
        require_plain(((name, "1"),), granted=((name, "1"),))


@given(st.data())
def test_no_listed_value_can_name_a_file(data: st.DataObject) -> None:
    name = data.draw(st.sampled_from(sorted(PLAIN)))
    value = data.draw(st.from_regex(re.compile(PLAIN[name], re.ASCII), fullmatch=True))
    assert is_plain(name, value)
    assert not set(value) & set("/\\$`~%'\"<|&*?!\n\r\t\0")
    require_form(((name, value),))


@given(
    st.sampled_from(sorted(PLAIN)) | st.text(max_size=12),
    st.text(max_size=40)
    | st.from_regex(r"(/|\.\./|~/|\./)[a-z/.]{0,20}(\.so(\.[0-9])?)?", fullmatch=True),
)
@example("NCCL_NET", "ofi")
@example("NCCL_NET", "IB\n")
@example("OMP_NUM_THREADS", "1\x00LD_PRELOAD=x")
@example("NCCL_SOCKET_IFNAME", "eth0/../x")
@example("CUDA_VISIBLE_DEVICES", "")
@example("nccl_debug", "INFO")
@example("NCCL_DEBUG ", "INFO")
@example("", "")
def test_anything_else_needs_the_flag(name: str, value: str) -> None:
    """Accepted is a listed name with a whole match of its form; nothing else ever is."""
    try:
        require_form(((name, value),))
        require_plain(((name, value),))
    except UserError:
        assert name not in PLAIN or not is_plain(name, value)
        return
    assert name in PLAIN
    assert re.fullmatch(PLAIN[name], value)
    assert "/" not in value
    assert value.isprintable()


@given(st.text(max_size=5), st.text(max_size=5))
def test_a_policy_is_made_or_refused(name: str, value: str) -> None:
    try:
        policy = codec.decode(Policy, {"env": {name: value}})
    except UserError:
        return
    assert policy.env == ((name, value),)
    assert value.isprintable()
    assert "=" not in name


@pytest.mark.parametrize(
    "value", ["a\nb", "a\x00", "\x1b[2J", "\ud800", "x" * (MAX_VALUE_CHARS + 1)]
)
def test_odd_values_are_nobodys(value: str) -> None:
    with pytest.raises(UserError, match="printable"):
        Policy(env=(("NCCL_DEBUG", value),))
    with pytest.raises(UserError, match="printable"):
        parse_assignments([f"X={value}"])


def test_the_listed_ones_people_use() -> None:
    for word in (
        "NCCL_DEBUG=INFO", "NCCL_ALGO=Ring", "NCCL_ALGO=allreduce:tree,ring;broadcast:ring",
        "NCCL_PROTO=^LL128", "NCCL_IB_HCA=mlx5_0:1,mlx5_1:1", "NCCL_IB_HCA==mlx5_0",
        "NCCL_SOCKET_IFNAME=^docker,lo", "NCCL_P2P_LEVEL=NVL", "NCCL_NTHREADS=256",
        "NCCL_DEBUG_SUBSYS=INIT,NET", "OMP_NUM_THREADS=4", "OMP_NUM_THREADS=4,2",
        "CUDA_DEVICE_MAX_CONNECTIONS=1", "CUDA_LAUNCH_BLOCKING=1", "CUDA_VISIBLE_DEVICES=0,2",
        "CUDA_VISIBLE_DEVICES=GPU-8f2b1f5e-9c11-4f4e-a2ad-3b5d3c7c3d11",
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True,max_split_size_mb:256",
        "PYTORCH_CUDA_ALLOC_CONF=garbage_collection_threshold:0.8",
        "PYTORCH_ALLOC_CONF=roundup_power2_divisions:[256:1,512:2,>:8]",
        "CUBLAS_WORKSPACE_CONFIG=:4096:8", "TORCH_NCCL_AVOID_RECORD_STREAMS=1",
        "KMP_AFFINITY=granularity=fine,compact,1,0", "GOMP_CPU_AFFINITY=0-7:2 8",
        "MALLOC_TRIM_THRESHOLD_=131072", "TORCHINDUCTOR_MAX_AUTOTUNE=1", "FI_PROVIDER=efa",
    ):  # fmt: skip
        require_plain(parse_assignments([word]))


def test_one_name_with_two_values() -> None:
    assert parse_assignments(["A=1", "B=x=y", "A=1"]) == (("A", "1"), ("B", "x=y"))
    with pytest.raises(UserError, match="two values"):
        parse_assignments(["A=1", "A=2"])
    for word in ("A", "=1", "A B=1", "LD-X=1"):
        with pytest.raises(UserError):
            parse_assignments([word])

"""Describe: the types that every part of fourfold speaks, and the catalogue behind their names."""

from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.cluster import Cluster, Link
from fourfold.spec.device import Device, Peaks
from fourfold.spec.job import Job, Limits
from fourfold.spec.layout import AXES, Layout
from fourfold.spec.model import ModelShape, Positions, RopeScaling
from fourfold.spec.policy import Dtypes, Policy
from fourfold.spec.run import Fault, RunSpec
from fourfold.spec.words import DTYPE_BYTES

__all__ = [
    "AXES",
    "DTYPE_BYTES",
    "Batch",
    "Cluster",
    "Device",
    "Dtypes",
    "Fault",
    "Job",
    "Layout",
    "Limits",
    "Link",
    "ModelShape",
    "Peaks",
    "Policy",
    "Positions",
    "Ramp",
    "RopeScaling",
    "RunSpec",
]

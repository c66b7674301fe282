"""Describe: the types that every part of fourfold speaks, and the catalogue behind their names."""

from fourfold.spec.batch import Batch, Ramp
from fourfold.spec.cluster import Cluster, Device, Link
from fourfold.spec.layout import Layout
from fourfold.spec.model import ModelShape
from fourfold.spec.policy import Policy
from fourfold.spec.run import RunSpec

__all__ = [
    "Batch",
    "Cluster",
    "Device",
    "Layout",
    "Link",
    "ModelShape",
    "Policy",
    "Ramp",
    "RunSpec",
]

"""Settings of all tests: no wall-clock limits, since machines are shared and noisy."""

from __future__ import annotations

from hypothesis import HealthCheck, settings

settings.register_profile(
    "fourfold", deadline=None, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("fourfold")

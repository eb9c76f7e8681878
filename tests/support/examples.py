"""Settings for property tests: the same examples in every run, on a machine of any speed."""

from hypothesis import HealthCheck, settings

SETTLED = settings(
    deadline=None,
    database=None,
    derandomize=True,
    # It measures the machine.
    suppress_health_check=[HealthCheck.too_slow],
)

"""Pipeline parallelism: stage placement and schedules, unrolled or as a loop."""

"""Pipeline parallelism: how layers are cut into stages, schedules as data, and what runs them."""

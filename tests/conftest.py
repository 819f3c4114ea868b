"""Eight virtual CPU devices for every test."""

import jax

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_disable_most_optimizations", True)  # programs run once here: compiling is what takes time

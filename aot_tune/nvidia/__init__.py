"""All that knows NVIDIA's software: cuTile, signatures, cubins, machine code, NVML. Knows no kernel."""

"""What depends on NVIDIA's software: cuTile, signatures, cubins, machine code, NVML. Knows no kernel."""

"""All that depends on NVIDIA software: cuTile, signatures, cubins, machine code, NVML. Imports no kernel."""

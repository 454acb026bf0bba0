"""What runs in the measuring process: it alone holds a CUDA context and can be killed."""

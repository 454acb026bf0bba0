"""The measuring process: it alone holds a CUDA context, and it can be killed."""

"""The measuring process. It alone holds a CUDA context, and it can be killed."""

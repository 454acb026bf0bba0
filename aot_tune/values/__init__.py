"""The words of the domain as frozen values: archs, configs, problems, buckets, devices. Pure."""

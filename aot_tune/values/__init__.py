"""Frozen values of the domain: archs, configs, problems, buckets, devices. Pure."""

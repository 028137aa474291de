"""The operating-system process around workers: signals, supervision, probes, web servers."""

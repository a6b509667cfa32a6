"""Benchmarks, compared with baselines. `./dev bench` lists them; each prints one line of JSON at its end."""

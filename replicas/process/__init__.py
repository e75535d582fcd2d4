"""What every process has, router and replica alike: settings, logs, secret and TLS files, traces."""

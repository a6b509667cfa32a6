"""The gRPC server: the services of the log, and those of Orisun."""

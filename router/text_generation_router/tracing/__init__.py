"""Traces of requests and steps; only imported if traces are on."""

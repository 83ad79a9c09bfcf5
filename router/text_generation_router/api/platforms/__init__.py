"""The routes of platforms: SageMaker, Vertex AI, KServe, and the probes of orchestrators."""

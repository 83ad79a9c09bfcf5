"""OpenAI's routes: completions, chat completions and models, with OpenAI's errors."""

"""How the embedded model is made: its corpus, its training and its evaluation.

Not shipped.  From the repository's root (`PYTHONPATH=launcher` where the project isn't installed
in editable form)::

    python -m embedded_model_training.train                # an hour on two cores
    python -m embedded_model_training.train --resume       # continue after an interruption
    python -m embedded_model_training.evaluate             # the scores, result.json, model card

`corpus` reads the standard library, `dialogue` turns it into exchanges, `batches` into rows of
tokens, `save` writes the checkpoint and `card` its model card.
"""

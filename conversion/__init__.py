"""Conversions: from the form in which weights or texts come to the form in which the library uses them.

`packaged_model` turns models that are distributed as Python packages into ordinary Hugging Face folders.
"""

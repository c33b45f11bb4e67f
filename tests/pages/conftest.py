from hypothesis import settings

# The machine that runs the tests may be busy: an example has no time limit of its own.
settings.register_profile("arrays", deadline=None, max_examples=60)
settings.load_profile("arrays")

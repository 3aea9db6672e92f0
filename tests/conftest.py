from hypothesis import settings

# No deadline: a timing is never a test.
settings.register_profile("usual", deadline=None)
settings.register_profile("thorough", deadline=None, max_examples=2000)
settings.load_profile("usual")

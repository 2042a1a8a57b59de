from hypothesis import settings

# A shared machine may pause in the middle of an example; that is not a failure.
settings.register_profile("trees", deadline=None)
settings.load_profile("trees")

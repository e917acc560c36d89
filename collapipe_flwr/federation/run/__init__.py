"""One run of the app: checked, started, followed, recorded; and the parts of its ServerApp."""

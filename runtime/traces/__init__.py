"""When each work item of a run was computed: as a model, as events, as a picture."""

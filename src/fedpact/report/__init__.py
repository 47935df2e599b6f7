"""Tables, figures and the page of a run; reads records of runs, never trains."""

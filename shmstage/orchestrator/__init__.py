"""Who decides: intake, feeder, the sans-IO schedule of the step boundary, and the program that gives it hands."""

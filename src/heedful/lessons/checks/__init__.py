"""The checks of the exercises, a module for each lesson: functions `check_NAME(answer)` that raise `Wrong`."""

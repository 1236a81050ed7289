"""Plans that users hold: placements, explanations, reports, comparisons, files."""

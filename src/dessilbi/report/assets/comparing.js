// What several runs have: their differences, their curves beside each other; tickets; growth.

function comparisonOfRuns(data) { return null; }
function tickets(comparison) { return null; }
function growth(view) { return null; }

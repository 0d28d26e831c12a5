// The report: the same charts as the live page's, of the points that the file holds.

function changed() {}

const found = JSON.parse($("data").textContent);
state.runs = found.runs;
if (state.runs.some((run) => run.recorded.length)) {
  begin();
  arrange(found.charts);
  // The file has one mean, so that there is a switch and no slider.
  $("smooth").type = "checkbox";
  $("smooth").checked = true;
  $("tools").hidden = false;
  legend();
  charts.forEach((chart) => chart.draw());
  takeExperts(found.experts);
}
document.body.dataset.drawn = "true";

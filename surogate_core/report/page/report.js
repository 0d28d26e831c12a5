// The report: the same charts as the live page's, of the points that the file holds.

function changed() {}

state.runs = JSON.parse($("data").textContent).runs;
if (state.runs.some((run) => run.recorded.length)) {
  begin();
  // The file has one mean, so that there is a switch and no slider.
  $("smooth").type = "checkbox";
  $("smooth").checked = true;
  $("tools").hidden = false;
  legend();
  charts.forEach((chart) => chart.draw());
}
document.body.dataset.drawn = "true";

// Without scripts the page is complete: it shows every metric, and its last value.

function shortNumber(value) {
  const isPlain = Math.abs(value) >= 1e-3 || value === 0;
  return isPlain ? String(Number(value.toPrecision(4))) : value.toExponential(1);
}

function nearestPoint(points, wantedStep) {
  let nearest = points[0];
  for (const point of points) {
    if (Math.abs(point[0] - wantedStep) < Math.abs(nearest[0] - wantedStep)) {
      nearest = point;
    }
  }
  return nearest;
}

// The values of a chart under the pointer.
function showValuesUnderPointer(figure) {
  const { first, last, left, right, width, series } = JSON.parse(figure.dataset.hover);
  const svg = figure.querySelector("svg");
  const cursor = figure.querySelector(".cursor");
  const output = figure.querySelector("output");
  const values = figure.querySelectorAll("figcaption b");

  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect();
    const pointer = (event.clientX - box.left) / box.width * width;
    const wantedStep = first + (pointer - left) / (right - left) * (last - first);

    let shownStep = null;
    series.forEach(([, points], i) => {
      const [step, value] = nearestPoint(points, wantedStep);
      values[i].textContent = shortNumber(value);
      if (shownStep === null || Math.abs(step - wantedStep) < Math.abs(shownStep - wantedStep)) {
        shownStep = step;
      }
    });

    const x = left + (shownStep - first) / (last - first) * (right - left);
    cursor.setAttribute("x1", x);
    cursor.setAttribute("x2", x);
    cursor.setAttribute("visibility", "visible");
    output.textContent = "step " + shownStep;
  });

  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden");
    output.textContent = "";
    for (const value of values) {
      value.textContent = value.dataset.now;
    }
  });
}

// The filter box: charts whose title or metric names contain every word of it.
function filterCharts(input) {
  const figures = [...document.querySelectorAll("figure[data-names]")];
  const headings = [...document.querySelectorAll("[data-charts]")];
  const count = document.querySelector(".filter output");

  function apply() {
    const words = input.value.toLowerCase().split(/\s+/).filter(word => word !== "");
    let shown = 0;
    for (const figure of figures) {
      const names = figure.dataset.names.toLowerCase();
      const matches = words.every(word => names.includes(word));
      figure.hidden = !matches;
      if (matches) {
        shown += 1;
      }
    }
    for (const heading of headings) {
      const charts = document.getElementById(heading.dataset.charts);
      heading.hidden = charts.querySelector("figure:not([hidden])") === null;
    }
    count.textContent = words.length === 0 ? "" : `${shown} of ${figures.length} charts`;
  }

  input.addEventListener("input", apply);
  input.parentElement.hidden = false;
  apply(); // a browser may keep the text of a reloaded page
}

for (const figure of document.querySelectorAll("figure[data-hover]")) {
  showValuesUnderPointer(figure);
}
for (const input of document.querySelectorAll(".filter input")) {
  filterCharts(input);
}

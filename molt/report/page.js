// Reads the values under the pointer; without scripts the page is complete, and shows the last values.
for (const figure of document.querySelectorAll("figure[data-hover]")) {
  const { first, last, series } = JSON.parse(figure.dataset.hover);
  const svg = figure.querySelector("svg"), cursor = figure.querySelector(".cursor");
  const output = figure.querySelector("output"), values = figure.querySelectorAll("figcaption b");
  const [left, right, width] = [46, 390, 400];
  const show = v => Math.abs(v) >= 1e-3 || v === 0 ? String(+v.toPrecision(4)) : v.toExponential(1);
  svg.addEventListener("pointermove", event => {
    const box = svg.getBoundingClientRect(), at = (event.clientX - box.left) / box.width * width;
    const wanted = first + (at - left) / (right - left) * (last - first);
    let step = null;
    series.forEach(([, points], i) => {
      const near = points.reduce((a, b) => Math.abs(b[0] - wanted) < Math.abs(a[0] - wanted) ? b : a);
      if (step === null || Math.abs(near[0] - wanted) < Math.abs(step - wanted)) step = near[0];
      values[i].textContent = show(near[1]);
    });
    const x = left + (step - first) / (last - first) * (right - left);
    cursor.setAttribute("x1", x); cursor.setAttribute("x2", x); cursor.setAttribute("visibility", "visible");
    output.textContent = "step " + step;
  });
  svg.addEventListener("pointerleave", () => {
    cursor.setAttribute("visibility", "hidden"); output.textContent = "";
    values.forEach(value => value.textContent = value.dataset.now);
  });
}

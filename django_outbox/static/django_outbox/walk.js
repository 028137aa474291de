// Presses "Go on" by itself, unless the person has pressed "Stop here".
const form = document.querySelector("form[data-outbox-walk]");
const waiting = setTimeout(() => form.requestSubmit(), 300);
form.querySelector("a").addEventListener("click", () => clearTimeout(waiting));

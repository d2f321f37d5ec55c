"""The engine: text, scheduling, memory, execution and models behind one interface (`api`)."""

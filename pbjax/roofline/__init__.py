"""The roofline of a model: FLOPs, bytes and seconds of every stage, predicted and measured."""

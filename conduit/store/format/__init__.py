"""What bytes mean: words, layout, tables as they are specified. Pure facts; nothing here touches a segment."""

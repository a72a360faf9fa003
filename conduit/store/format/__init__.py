"""The format of a segment: its words, its layout, and the specification of tables. Pure computation; nothing here touches a segment."""

"""What third parties need to test a transport or an engine adapter of their own. Needs pytest."""
